"""What clients have in common whose calls are computed in other processes, whatever is between."""
