"""NumPy's operations on resident arrays."""
