"""Draw rows as charts: in the terminal, on HTML pages, as image files."""
