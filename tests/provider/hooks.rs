//! libfabric's own hooks around the provider, by our own program in C.

use super::{compile, succeed, with};

/// Hooks of every libfabric, and those that 2.x added. Left out are those that decline: `perf`
/// without counters of the processor, `debug` with `FI_THREAD_SAFE`, `profile` without a provider's
/// own numbers.
const HOOKS: [&str; 1] = ["noop"];
const LATE: [&str; 2] = ["trace", "monitor"];

/// Row X80: messages, remote memory, atomics, counters and errors come through each hook, and where
/// a hook has no collectives a domain that has them works and their calls are refused.
#[test]
fn everything_goes_through_hooks() {
    with(&[("cc", "gcc"), ("fi_info", "libfabric-bin")], |bench| {
        let dir = tempfile::tempdir().unwrap();
        let program = compile(dir.path(), &["cc", "-lfabric", "-ldl"], "hooks.c");
        let collectives = compile(dir.path(), &["cc", "-lfabric"], "collectives.c");
        let run = |hook: &str, library: Option<&std::path::Path>, program: &std::path::Path| {
            let mut command = bench.program(program.to_str().unwrap());
            if let Some(library) = library {
                command.env("LD_LIBRARY_PATH", library);
            }
            let said = succeed(command.env("FI_HOOK", hook), 120);
            let wrong: Vec<_> = said.lines().filter(|line| line.starts_with("BAD")).collect();
            assert!(wrong.is_empty(), "{hook}: {wrong:#?}");
            assert!(said.contains("ok end\n"), "{hook}: {said}");
        };
        for hook in HOOKS {
            run(hook, None, &program);
            run(hook, None, &collectives);
        }
        // The newer libfabric that is inside of an MPI's wheel.
        let newer = bench.dir.parent().unwrap().join("mpi/mpich/lib/mpich");
        if !newer.join("libfabric.so.1").is_file() {
            println!("SKIPPED: no libfabric 2 in {}", newer.display());
            return;
        }
        for hook in HOOKS.into_iter().chain(LATE) {
            run(hook, Some(&newer), &program);
        }
    });
}
