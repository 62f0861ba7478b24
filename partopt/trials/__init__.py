"""Schedules tried without a profile: on equal stages, beside what their formulas say."""
