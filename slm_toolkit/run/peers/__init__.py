"""What a rank knows of its launch and of the other ranks."""
