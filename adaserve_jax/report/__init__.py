"""Reports on result files: what they say (documents of tables and figures), and how it is written (HTML, Markdown)."""
