"""Getting a model's files: names, downloads, verification, and the directory they live in.

Above checkpoint, which reads what lies here; knows no tensors. The hub's own library is used in listing.py alone.
"""
