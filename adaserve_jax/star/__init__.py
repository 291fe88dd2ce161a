"""One draft for many targets: the draft service, and the drafter that speaks to it. Source: StarSD."""
