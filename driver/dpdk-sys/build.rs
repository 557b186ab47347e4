//! Makes the bindings, compiles the wrappers, and says how to link.

fn main() {
    #[cfg(feature = "dpdk")]
    if let Err(why) = dpdk::build() {
        println!("cargo::error={why}");
    }
}

#[cfg(feature = "dpdk")]
mod dpdk {
    use std::env;
    use std::path::{Path, PathBuf};
    use std::process::Command;

    /// 21.11 is the first with the table of burst functions; 22.11 is what this is tested with.
    const OLDEST: &str = "22.11";

    const INSTALL: &str = "install it with: sudo apt-get install -y libdpdk-dev libclang-dev \
                           pkg-config; or build without --features dpdk";

    const FUNCTIONS: &[&str] = &[
        "barewire_rte_.*",
        "rte_eal_(init|cleanup|alarm_set|alarm_cancel|has_hugepages|hotplug_(add|remove))",
        "rte_dev_(probe|remove|name|dma_map|dma_unmap)",
        "rte_extmem_(register|unregister)",
        "rte_eth_dev_(get_port_by_name|is_valid_port|info_get|configure|start|stop|close)",
        "rte_eth_dev_(get_mtu|set_mtu|socket_id|adjust_nb_rx_tx_desc|is_removed)",
        "rte_eth_dev_(set_link_up|rx_intr_.*)",
        "rte_eth_(rx|tx)_queue_setup",
        "rte_eth_(macaddr_get|promiscuous_enable|allmulticast_enable|link_get_nowait)",
        "rte_eth_(stats_get|find_next|from_rings|dev_default_mac_addr_set)",
        "rte_flow_(create|validate|destroy|isolate|flush)",
        "rte_openlog_stream",
        "rte_log_set_(global_level|level_pattern)",
        "rte_mempool_(free|avail_count|in_use_count|get_bulk)",
        "rte_pktmbuf_(pool_create|alloc_bulk|free_bulk|free|attach_extbuf)",
        "rte_ring_(create|free|enqueue_burst|dequeue_burst)",
        "rte_strerror",
        "rte_thread_(register|unregister)",
        "rte_version",
    ];

    const TYPES: &[&str] = &[
        "rte_eth_(conf|dev_info|rxconf|txconf|link|stats|fp_ops)",
        "rte_ether_addr",
        "rte_flow_.*",
        "rte_mbuf",
        "rte_mbuf_ext_shared_info",
    ];

    const VALUES: &[&str] = &[
        "rte_eth_fp_ops",
        "RTE_ETH_(NAME_MAX_LEN|MAX_PORTS|TX_OFFLOAD_.*|RX_OFFLOAD_.*|LINK_UP|SPEED_NUM_.*)",
        "RTE_MAX_ETHPORTS",
        "RTE_MBUF_F_(EXTERNAL|INDIRECT)",
        "RTE_PKTMBUF_HEADROOM",
        "RTE_ETHER_TYPE_.*",
        "RTE_LOG_(ERR|WARNING|NOTICE|INFO|DEBUG)",
        "RING_F_S[PC]_.*",
    ];

    pub(crate) fn build() -> Result<(), String> {
        for file in ["wrapper.h", "shim.h", "shim.c", "build.rs"] {
            println!("cargo::rerun-if-changed={file}");
        }
        pkg_config::Config::new()
            .atleast_version(OLDEST)
            .probe("libdpdk")
            .map_err(|_found_none| format!("DPDK {OLDEST} or newer is not installed: {INSTALL}"))?;
        let flags = cflags()?;
        let out = PathBuf::from(env::var_os("OUT_DIR").ok_or("no OUT_DIR: run cargo")?);
        bind(&flags, &out)?;
        compile(&flags, &out);
        // Not in libdpdk's list, since programs are not meant to call drivers.
        println!("cargo::rustc-link-lib=rte_net_ring");
        Ok(())
    }

    /// All of them: the crate pkg-config drops `-include` and `-march`, without which the headers
    /// do not compile.
    fn cflags() -> Result<Vec<String>, String> {
        let program = env::var("PKG_CONFIG").unwrap_or_else(|_unset| "pkg-config".to_owned());
        let output = Command::new(&program).args(["--cflags", "libdpdk"]).output();
        let output = output.map_err(|why| format!("{program}: {why}: {INSTALL}"))?;
        let text = String::from_utf8_lossy(&output.stdout);
        Ok(text.split_whitespace().map(str::to_owned).collect())
    }

    fn bind(flags: &[String], out: &Path) -> Result<(), String> {
        let mut builder = bindgen::Builder::default()
            .header("wrapper.h")
            .clang_args(flags)
            .wrap_static_fns(true)
            .wrap_static_fns_path(out.join("static_fns"))
            .default_enum_style(bindgen::EnumVariation::Consts)
            .prepend_enum_name(false)
            .derive_debug(false)
            .layout_tests(true)
            .generate_comments(false);
        for name in FUNCTIONS {
            builder = builder.allowlist_function(name);
        }
        for name in TYPES {
            builder = builder.allowlist_type(name);
        }
        for name in VALUES {
            builder = builder.allowlist_var(name);
        }
        // Packed structs with aligned members, which Rust cannot lay out; none is used.
        for name in ["rte_arp_ipv4", "rte_arp_hdr", "rte_l2tpv2_.*", "rte_gtp_psc_.*"] {
            builder = builder.opaque_type(name);
        }
        // It says that libclang is missing by a panic.
        let made = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| builder.generate()));
        let made = made.map_err(|_panic| format!("libclang is not installed: {INSTALL}"))?;
        let bindings = made.map_err(|why| format!("cannot read DPDK's headers: {why}"))?;
        let file = out.join("bindings.rs");
        bindings.write_to_file(&file).map_err(|why| format!("{}: {why}", file.display()))
    }

    fn compile(flags: &[String], out: &Path) {
        let mut build = cc::Build::new();
        for flag in flags {
            build.flag(flag);
        }
        build.file(out.join("static_fns.c")).file("shim.c").include(".").opt_level(3);
        build.warnings(false).compile("barewire_dpdk_shim");
    }
}
