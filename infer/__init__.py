"""Serving: a target that verifies, a drafter that prepares speculations for the outcomes of the verification in
flight.
"""
