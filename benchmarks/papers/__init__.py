"""The papers' figures and tables: what each shows, how it is run here, and what of its statements the runs bear out."""
