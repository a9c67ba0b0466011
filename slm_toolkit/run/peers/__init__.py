"""A rank's launch, and its exchange with the other ranks."""
