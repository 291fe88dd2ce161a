"""Results of a measurement: request records, result rows, their files and their aggregation."""
