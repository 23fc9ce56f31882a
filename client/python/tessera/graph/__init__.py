"""Expressions that are not computed yet, and the requests that are made from them."""
