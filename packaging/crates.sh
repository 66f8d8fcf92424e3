# Functions about the source of a crate, for scripts that source this file.

# Prints the names in the field "authors" of a Cargo.toml.
authors() { # CARGO_TOML
	sed -n '/^authors = \[/{:lines;/\]/!{N;b lines};p}' "$1" | grep -o '"[^"]*"' | tr -d '"'
}

# Prints the files at the top of a crate that contain licenses and notices.
license_files() { # DIRECTORY
	find "$1/" -maxdepth 1 -type f \( -iname '*licen[cs]e*' -o -iname '*copying*' -o -iname '*copyright*' -o -iname 'notice*' \) | LC_ALL=C sort
}
