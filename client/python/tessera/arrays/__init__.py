"""NumPy operations on resident arrays."""
