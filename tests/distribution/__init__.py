"""The source and the wheel as a whole: what lint refuses, what an installation holds. Too slow for each save."""
