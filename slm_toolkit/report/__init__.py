"""Turn records into rows, ranks and prediction errors, and show them."""
