"""Copies of whole KV pages, of all layers in one call, between pools or inside one."""
