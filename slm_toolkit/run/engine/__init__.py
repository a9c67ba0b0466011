"""The engine of a strategy, its optimizer, and the training state on each rank."""
