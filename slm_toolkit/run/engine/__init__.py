"""The engine that a strategy asks for, its optimizer, and the state that each rank holds."""
