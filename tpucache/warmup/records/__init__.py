"""One sample -> its records. No disk access; the only folder that imports image libraries."""
