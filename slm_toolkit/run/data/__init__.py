"""Turn data files into batches."""
