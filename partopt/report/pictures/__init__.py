"""Pictures of documents: SVG, PDF and PNG, drawn with matplotlib in one look."""
