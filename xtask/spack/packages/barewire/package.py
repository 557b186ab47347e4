"""barewire for Spack: the command and the provider that libfabric loads."""

import os

from spack.package import *


class Barewire(Package):
    """A fabric over plain Ethernet: programs that use libfabric, MPI among them, exchange messages
    and reach each other's memory over plain Ethernet frames."""

    homepage = "https://github.com/barewire/barewire"
    git = "https://github.com/barewire/barewire.git"

    license("MIT OR Apache-2.0", checked_by="barewire")

    version("main", branch="main")

    variant("dpdk", default=False, description="Ports on devices of DPDK")

    depends_on("c", type="build")
    depends_on("rust@1.88:", type="build")
    depends_on("libfabric@1.17:", type="run")
    depends_on("dpdk@22.11:", when="+dpdk")
    depends_on("llvm+clang", type="build", when="+dpdk")
    depends_on("pkgconfig", type="build", when="+dpdk")

    def install(self, spec, prefix):
        cargo = which("cargo", required=True)
        features = ["--features=dpdk"] if spec.satisfies("+dpdk") else []
        cargo(
            "build",
            "--release",
            "--locked",
            "--package=barewire-provider",
            "--package=barewire-cli",
            *features,
        )
        built = join_path("target", "release")
        mkdirp(prefix.bin, prefix.sbin, prefix.lib.libfabric, prefix.share.man.man7)
        install(join_path(built, "barewire"), prefix.bin)
        # libfabric takes every file of its directories whose name ends so.
        library = join_path(prefix.lib.libfabric, "libbarewire-fi.so")
        install(join_path(built, "libbarewire_fi.so"), library)
        script = join_path(prefix.sbin, "barewire-hugepage-setup")
        install("hugepage-setup.sh", script)
        set_executable(script)
        for page in ("barewire_ports.7", "fi_barewire.7"):
            install(join_path("docs", "man", page), prefix.share.man.man7)

    def setup_run_environment(self, env):
        env.prepend_path("FI_PROVIDER_PATH", self.prefix.lib.libfabric)

    def test_command(self):
        """the command runs"""
        barewire = which(self.prefix.bin.barewire, required=True)
        barewire("pingpong", "--spawn", "--iterations=100", "--port=shm:spack%d" % os.getpid())
