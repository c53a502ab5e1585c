"""The Debian package: `build.build_package` makes it for a target of `targets.TARGETS`.

`targets` (what it is built for), `wheels` (locks, and the wheels they name), `tree` (what lies
where), `control` (dependencies and maintainer scripts), `elf` (gates on the libraries), `sbom`,
`archive` (the .deb, byte for byte the same when built twice).
"""
