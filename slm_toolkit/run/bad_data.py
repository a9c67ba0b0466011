"""What is wrong with a data file in which reading got stuck: which file, which line or row."""


class BadData(ValueError):
    """Of a dataset, while it is read; says which file and where, with a hint."""
