"""Drafters: conversion between layouts, and probes of a drafter against its target."""
