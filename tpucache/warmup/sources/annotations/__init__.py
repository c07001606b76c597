"""Masks and boxes that are not beside an image as files: run lengths in a table, and COCO's JSON."""
