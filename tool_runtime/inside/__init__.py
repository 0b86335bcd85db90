"""The exec agent: what runs inside a sandbox. Standard library only, Python 3.9 and later, imported by path on the other side.

The host imports `frames` and nothing else from here.
"""
