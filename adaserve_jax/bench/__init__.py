"""Measures an engine under load: workloads, open-loop arrivals, result rows. Needs none of the server's packages."""
