"""Records to tables, pages, pictures, exported files and trackers."""
