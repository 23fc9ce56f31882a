"""Uploads and downloads of arrays."""
