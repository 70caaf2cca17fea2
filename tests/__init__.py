"""Tests of dynaxla."""
