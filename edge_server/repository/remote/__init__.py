"""Models in stores elsewhere: S3, HTTPS servers and OCI registries, fetched into a repository here.

`origin.open_origin` lists the files behind a URL, `download` fetches them so that a cut connection
resumes, `archive` unpacks what an archive may hold. The daemon imports nothing of this room: it
serves from local disks only.
"""
