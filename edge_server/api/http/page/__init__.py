"""The page for people, at `/`: `page_routes` in `routes`; the rest is its own."""
