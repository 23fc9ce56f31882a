"""Expressions that nobody has computed yet, and the requests that are made of them."""
