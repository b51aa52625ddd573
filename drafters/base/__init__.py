"""Shared base: settings, user errors, logging, atomic writes, progress, bootstrap intervals and HTML reports."""
