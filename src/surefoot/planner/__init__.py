"""Forecasts of memory and time from a model's config alone, and the settings that fit."""
