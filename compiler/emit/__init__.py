"""From programs to text: classes lifted from the graph, views for the templates, files."""
