//! Says to the linker what makes the library safe to unload: that it never is.

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    // A progress thread and a fork handler may be alive when libfabric closes the library.
    println!("cargo:rustc-cdylib-link-arg=-Wl,-z,nodelete");
    println!("cargo:rustc-cdylib-link-arg=-Wl,-soname,libbarewire-fi.so");
}
