"""The ready-made web service: what ``service-streamer serve`` runs."""
