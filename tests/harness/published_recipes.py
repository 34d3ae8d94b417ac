"""Recipes in the shapes in which they are published: one small file each, in words of our own."""

from __future__ import annotations

from pathlib import Path

RECIPES = Path(__file__).parents[1] / "data" / "recipes"
