"""Starting `accelerate launch`, on one machine or several, and how launches end."""
