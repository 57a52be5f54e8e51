"""Measuring: long inputs, arms side by side, tables and plots."""
