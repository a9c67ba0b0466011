"""What is observed while a run trains."""
