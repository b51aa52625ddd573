"""Settings, user errors, logging, atomic writes, progress, bootstrap intervals, report pages."""
