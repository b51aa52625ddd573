"""From the records of a measurement to figures."""
