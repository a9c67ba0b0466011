"""When a run can't go on: who is to blame, and how it ends."""
