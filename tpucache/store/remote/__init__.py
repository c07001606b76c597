"""Bytes of a cache that lies on another machine."""
