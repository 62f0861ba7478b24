"""Reports: what people look at, from documents alone. One file a form."""
