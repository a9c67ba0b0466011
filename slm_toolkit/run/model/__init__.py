"""The Hugging Face model that a run trains."""
