"""What a notebook shows: each module holds one view. Rows and numbers go in, pictures and controls come out."""
