"""The Berkeley Function-Calling Leaderboard: one call, several, none, and calls over turns on simulated tools."""
