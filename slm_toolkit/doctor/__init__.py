"""What is wrong or unwise in a model and its configuration."""
