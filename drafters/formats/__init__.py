"""Layouts of EAGLE-3 heads that other engines read and other projects write: export, import, refusals by name."""
